"""``twinpool``, which is ``kubectl twinpool`` as well: the console script.

Exit codes: 0 done, 1 the answer is no (a stale file, an invalid manifest, a pool that does not serve) or there is none,
2 the command was not understood. What is printed is for people on a terminal, plain in a pipe, and for programs with
``-o json``.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import yaml
from cyclopts import App, Parameter
from rich.console import Console

from twinpool.cli.bench.command import bench
from twinpool.cli.crd import check_fresh, crd_yaml
from twinpool.cli.defragment import defragment
from twinpool.cli.doctor import doctor
from twinpool.cli.explain import explain
from twinpool.cli.live.command import live
from twinpool.cli.manual import manual_page
from twinpool.cli.metrics import metrics
from twinpool.cli.options import Format  # noqa: TC001 - read at run time by cyclopts
from twinpool.cli.placement import plan
from twinpool.cli.rollout import app as rollout
from twinpool.cli.simulate import simulate
from twinpool.cli.status import status
from twinpool.cli.table import write_value
from twinpool.cli.top import top
from twinpool.cli.trace import trace
from twinpool.cli.validate import validate as validate_stream
from twinpool.core import reference
from twinpool.core.errors import TwinpoolError

app = App(
    name="twinpool",
    help="Serve large language models from twin pools of prefill and decode workers on Kubernetes.",
    version=version("twinpool"),
)
app.command(status)
app.command(doctor)
app.command(top)
app.command(rollout)
app.command(plan)
app.command(explain)
app.command(simulate)
app.command(trace)
app.command(bench)
app.command(defragment)
app.command(metrics)
app.command(live)


@app.command
def crd(
    *,
    check: Path | None = None,
    output: Annotated[Literal["yaml", "markdown"], Parameter(name=["--output", "-o"])] = "yaml",
) -> int:
    """Print the CustomResourceDefinition of InferencePool.

    Parameters
    ----------
    check
        Compare this file with what would be printed, and fail when it differs.
    output
        The definition as YAML, or its fields as a page to read.
    """
    text = crd_yaml() if output == "yaml" else reference.markdown()
    if check is None:
        sys.stdout.write(text)
    else:
        check_fresh(check, text, "core/twinpool/core/spec.py")
    return 0


@app.command
def completion(shell: Literal["bash", "zsh", "fish"]) -> int:
    """Print the completion of a shell: `source <(twinpool completion bash)`."""
    sys.stdout.write(app.generate_completion(prog_name="twinpool", shell=shell))
    return 0


@app.command
def manual(*, check: Path | None = None) -> int:
    """Print every command with its options as a page, as it is in `docs/cli.md`.

    Parameters
    ----------
    check
        Compare this file with what would be printed, and fail when it differs.
    """
    text = manual_page(app)
    if check is None:
        sys.stdout.write(text)
    else:
        check_fresh(check, text, "cli/twinpool/cli")
    return 0


@app.command
def validate(
    file: Annotated[
        str,
        Parameter(name=["--file", "-f"], help="Manifest to check; - reads standard input.", allow_leading_hyphen=True),
    ],
    *,
    output: Format = "text",
) -> int:
    """Check pools in a manifest without a cluster: unknown fields, wrong types, wrong units.

    Rules over several fields are checked by the API server at `kubectl apply`.
    """
    try:
        if file == "-":
            report = validate_stream(sys.stdin)
        else:
            with Path(file).open() as stream:
                report = validate_stream(stream)
    except (OSError, yaml.YAMLError) as error:
        raise TwinpoolError(f"{file} cannot be read: {error}", "give a YAML file, or - for standard input") from None
    if not report.pools:
        raise TwinpoolError(
            f"{file} holds no InferencePool of serving.twinpool.dev/v1alpha1", "check apiVersion and kind"
        )
    if output != "text":
        write_value(asdict(report), output)
    else:
        for problem in report.problems:
            sys.stdout.write(f"{problem}\n")
        for pool in report.pools:
            if all(problem.pool != pool for problem in report.problems):
                sys.stdout.write(f"{pool}: ok\n")
    return 1 if report.problems else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; problems that a user can mend are one line on stderr."""
    try:
        result: int | None = app(arguments, result_action="return_value", exit_on_error=False, print_error=True)
    except TwinpoolError as error:
        Console(stderr=True, highlight=False).print(f"twinpool: {error}", markup=False, soft_wrap=True)
        return 1
    except Exception as error:
        if type(error).__module__.startswith("cyclopts"):
            return 2
        raise
    return result or 0


if __name__ == "__main__":
    sys.exit(main())

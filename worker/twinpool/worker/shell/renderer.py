"""Becomes the pool's renderer. Nothing stays to watch over it: its probes and its exit are the kubelet's to see."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, NoReturn

from twinpool.worker.engines.command import Pod, redacted
from twinpool.worker.engines.render import render_command
from twinpool.worker.shell.host import cannot_start, check_model_path, log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.core.protocol import WorkerConfig


def become(config: WorkerConfig, environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the renderer.

    Raises
    ------
    InvalidValue
        When the settings cannot be used, or the model or the interpreter is not there.
    """
    check_model_path(config)
    command = render_command(config, Pod.from_environment(environment), environment, sys.executable)
    log(f"starting {shlex.join(redacted(command.argv))}")
    try:
        os.execvpe(command.argv[0], command.argv, dict(command.environment))  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise cannot_start(command.argv[0], error) from None

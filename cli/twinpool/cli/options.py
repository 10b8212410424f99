"""Options that many commands share, written once so that they are spelt and explained alike."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

Namespace = Annotated[str, Parameter(name=["--namespace", "-n"], help="Namespace of the pool; default: kubectl's.")]
Context = Annotated[str, Parameter(name="--context", help="Context of the kubeconfig; default: kubectl's.")]
Format = Annotated[Literal["text", "json", "yaml"], Parameter(name=["--output", "-o"], help="text, json or yaml.")]

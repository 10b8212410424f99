"""The ``rollout`` block of a pool: how a new revision replaces the old one, with its counts and percentages."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, WithJsonSchema

from twinpool.core.fields import Duration, Part, rule, rules

_PERCENT = "^(100|[1-9]?[0-9])%$"
_COUNT = Annotated[int, Field(ge=0, le=1000)] | Annotated[str, Field(pattern=_PERCENT)]
#: A count or a percentage, as in a Deployment. pydantic's union has no structural schema, so it is written here.
Amount = Annotated[
    _COUNT,
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "maxLength": 4,
            **rules(
                rule(
                    f"type(self) == int ? self >= 0 && self <= 1000 : self.matches(r'{_PERCENT}')",
                    "must be a count from 0 to 1000, or a percentage as a string from '0%' to '100%'",
                )
            ),
        }
    ),
]


def resolved(amount: int | str, wanted: int, *, up: bool) -> int:
    """Return a count, or the percentage of ``wanted`` rounded up or down to one."""
    if isinstance(amount, int):
        return amount
    share = int(amount.removesuffix("%")) * wanted
    return -(-share // 100) if up else share // 100


class RoleRollout(Part):
    """What one role does differently."""

    max_surge: Amount | None = Field(None, description="Groups above the role's replicas; default: the pool's.")
    max_unavailable: Amount | None = Field(None, description="Groups below the role's replicas; default: the pool's.")


#: The defaults. The API server judges a block's default before it has filled in those of its fields.
_SURGE, _UNAVAILABLE = 1, 0


def _effective(role: str, name: str, default: int) -> str:
    common = f"has(self.{name}) ? self.{name} : {default}"
    return f"(has(self.{role}) && has(self.{role}.{name}) ? self.{role}.{name} : {common})"


def _moves(role: str) -> dict[str, str]:
    surge, unavailable = _effective(role, "maxSurge", _SURGE), _effective(role, "maxUnavailable", _UNAVAILABLE)
    return rule(
        f"!(({surge} == 0 || {surge} == '0%') && ({unavailable} == 0 || {unavailable} == '0%'))",
        f"maxSurge and maxUnavailable cannot both be 0 for {role}: no group could ever be replaced; allow one more "
        "(maxSurge: 1, takes spare GPUs) or one fewer (maxUnavailable: 1)",
        field_path=".maxSurge",
    )


class Rollout(Part):
    """How a new revision replaces the old one. Prefill and decode move together, in ratio."""

    model_config = ConfigDict(json_schema_extra=rules(_moves("prefill"), _moves("decode")))

    max_surge: Amount = Field(
        _SURGE,
        description="Groups of each role that may exist above its replicas while a revision is replaced: a count, or "
        "a percentage rounded up. They take GPUs of their own.",
    )
    max_unavailable: Amount = Field(
        _UNAVAILABLE,
        description="Groups of each role that may be missing below its replicas meanwhile: a count, or a percentage "
        "rounded down. Use 1, with maxSurge 0, where no GPUs are spare.",
    )
    prefill: RoleRollout | None = Field(None, description="What prefill does differently.")
    decode: RoleRollout | None = Field(None, description="What decode does differently.")
    progress_deadline: Duration = Field(
        "1h",
        description="How long a rollout may stand still before Progressing says ProgressDeadlineExceeded; it goes on "
        "nevertheless. Longer than an engine takes to load.",
    )
    paused: bool = Field(False, description="Keep every group at its revision; numbers of groups still follow.")
    revision_history_limit: int = Field(
        10, ge=0, le=100, description="Revisions kept for `twinpool rollout undo` besides those in use."
    )

    def bounds(self, role: str, wanted: int) -> tuple[int, int]:
        """Return how many groups of a role may exist above and how many may be missing below ``wanted``."""
        own = (self.prefill if role == "prefill" else self.decode) or RoleRollout()
        surge = self.max_surge if own.max_surge is None else own.max_surge
        unavailable = self.max_unavailable if own.max_unavailable is None else own.max_unavailable
        above, below = resolved(surge, wanted, up=True), resolved(unavailable, wanted, up=False)
        # A small percentage of few groups is none, and nothing would ever move.
        return above, below if above or below else 1

"""The ``ratio`` block of a pool: the band in which prefill groups follow decode groups."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated

from pydantic import ConfigDict, Field

from twinpool.core.fields import Part, rule, rules

#: Prefill groups to decode groups.
_RATIO = "^[1-9][0-9]{0,2}:[1-9][0-9]{0,2}$"
RatioText = Annotated[
    str,
    Field(
        pattern=_RATIO,
        max_length=7,
        json_schema_extra=rules(
            rule(f"self.matches('{_RATIO}')", "must be PREFILL:DECODE, two whole numbers from 1 to 999 (1:2, 3:4)")
        ),
    ),
]


def _product(left: str, right: str) -> str:
    """Return the CEL for the prefill part of ``left`` times the decode part of ``right``."""
    return f"int(self.{left}.split(':')[0]) * int(self.{right}.split(':')[1])"


class Ratio(Part):
    """The band in which prefill groups follow decode groups."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                f"!self.min.matches('{_RATIO}') || !self.max.matches('{_RATIO}') "
                f"|| {_product('min', 'max')} <= {_product('max', 'min')}",
                "ratio.min must not be above ratio.max; both are prefill:decode, so 1:4 is below 1:2",
                field_path=".min",
            )
        )
    )

    min: RatioText = Field(description="Fewest prefill groups for decode groups, such as 1:4.")
    max: RatioText = Field(description="Most prefill groups for decode groups, such as 1:2.")

    @property
    def fractions(self) -> tuple[Fraction, Fraction]:
        """Return prefill over decode at both ends."""
        return _fraction(self.min), _fraction(self.max)


def _fraction(text: str) -> Fraction:
    prefill, decode = text.split(":")
    return Fraction(int(prefill), int(decode))

"""An exchange whose prompt a renderer may be asked about before a worker is chosen.

A class of its own, so that a pool without renderers pays nothing for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from twinpool.router.logic.rendering import count_read, tokens_read
from twinpool.router.logic.request import Route, with_comparison, with_ids
from twinpool.router.shell.exchange import Exchange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twinpool.router.logic.asked import Asked
    from twinpool.router.logic.endpoints import Endpoint
    from twinpool.router.logic.index_exact import Held
    from twinpool.router.logic.rendering import Rendered
    from twinpool.router.shell.call import Call
    from twinpool.router.shell.legs import PrefillLeg
    from twinpool.router.shell.pool import Pool
    from twinpool.router.shell.recipient import Client
    from twinpool.router.shell.rendering import Question, Rendering

#: Last bytes of an answer in which an engine's own count of prompt tokens is looked for.
_TAIL = 4096


class RenderedExchange(Exchange):
    """Asks at most once, and compares now and then what engines read with what the renderer made."""

    __slots__ = ("_before", "_compared", "_question", "_rendering", "_tail")

    def __init__(self, pool: Pool, client: Client, call: Call, rendering: Rendering) -> None:
        self._rendering = rendering
        self._question: Question | None = None
        #: What was known of the request before its prompt was rendered.
        self._before: Asked | None = None
        #: What the renderer made, where an engine makes its own, and the end of what that engine answers.
        self._compared: Rendered | None = None
        self._tail = b""
        super().__init__(pool, client, call)

    def start(self) -> None:
        """See :class:`Exchange`; first the prompt is rendered, where that is worth it."""
        if not self._asked.names:
            self._question = self._rendering.ask(self._call, self._asked, self._workers(), self._rendered)
        if self._question is None:
            super().start()

    def _workers(self) -> Sequence[Endpoint]:
        """Return those among whom the prompt's reader is chosen."""
        directory, config = self.pool.directory, self.pool.config
        hands_off = config.disaggregated and config.conditional != "never"
        return directory.prefill if hands_off and directory.prefill else directory.decode

    def _rendered(self, rendered: Rendered | None) -> None:
        self._question = None
        if rendered is not None:
            request = self._call.request
            self._before, self._asked = self._asked, self.pool.chooser.rendered(self._asked, rendered.ids, request)
            if self._rendering.trust.checks():
                self._compared = rendered
                self._call = replace(self._call, request=with_comparison(request))
            else:
                known = with_ids(request, rendered.text, chat=self._call.route is Route.CHAT)
                self._call = replace(self._call, request=known)
        super().start()

    def _located(self, held: Mapping[str, Held] | None) -> None:
        super()._located(held)
        if held is not None and self._before is not None:
            self._rendering.learn(self._before, self._asked, self._workers())

    def client_gone(self) -> None:
        """See :class:`Exchange`."""
        if self._question is not None:
            self._question.cancel()
            self._question = None
            self._record.status = 499
            self._record.log(self._state)
        super().client_gone()

    def prefill_ended(self, leg: PrefillLeg, status: int, body: bytes) -> None:
        """See :class:`Exchange`; its engine was asked which tokens it read."""
        if self._compared is not None and status == 200:
            read = tokens_read(body)
            if read is not None:
                self._rendering.judge(read == self._compared.ids)
            self._compared = None
        super().prefill_ended(leg, status, body)

    def decode_body(self, data: bytes) -> None:
        """See :class:`Exchange`."""
        if self._compared is not None:
            self._tail = (self._tail + data)[-_TAIL:]
        super().decode_body(data)

    def decode_ended(self) -> None:
        """See :class:`Exchange`; an engine that read the prompt itself may have said how many tokens it has."""
        if self._compared is not None and self._record.status == 200:
            count = count_read(self._tail)
            if count is not None:
                self._rendering.judge(count == len(self._compared.ids))
        super().decode_ended()

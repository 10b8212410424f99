"""The command line of the simulated engine. Pure: arguments in, settings out; an unknown flag is an error."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from twinpool.core import protocol
from twinpool.core.errors import InvalidValue
from twinpool.core.kv import SHAPES
from twinpool.core.tiers import ASSUMED_BANDWIDTH, ASSUMED_SETUP
from twinpool.core.timing import ACCELERATORS
from twinpool.worker.engines.simulated.logic import drafting, faults
from twinpool.worker.engines.simulated.logic.engine import Limits
from twinpool.worker.engines.simulated.logic.experts import Mixture, mixture
from twinpool.worker.engines.simulated.logic.pace import Pace
from twinpool.worker.engines.simulated.logic.tiers import KINDS, Loading, TierSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twinpool.worker.engines.simulated.logic.drafting import Drafting


@dataclass(frozen=True, slots=True)
class EventSettings:
    """Where KV events go: a ZMQ endpoint as vLLM spells it, and the one for replays."""

    endpoint: str
    replay_endpoint: str | None
    topic: str
    buffer_steps: int


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that the server is told. Times in seconds, sizes in bytes."""

    host: str
    port: int
    #: A rank above 0 of a group that spans nodes: it has no HTTP interface.
    headless: bool
    role: str
    models: tuple[str, ...]
    #: Names of LoRA adapters and what each was loaded from.
    adapters: dict[str, str]
    connector: bool
    side_channel_port: int
    limits: Limits
    pace: Pace
    time_scale: float
    startup_seconds: float
    shutdown_timeout: float
    handshake_timeout: float
    max_body_bytes: int
    events: EventSettings | None
    faults: faults.Faults
    drafting: Drafting | None = None
    #: KV tiers of each rank behind its blocks, and whether what they hold is loaded always or when that is faster.
    tiers: tuple[TierSettings, ...] = ()
    loading: Loading = "always"
    mixture: Mixture | None = None
    #: Ranks with an engine each, all in this process.
    data_parallel: int = 1
    #: Whether it turns texts and chats into token ids for others, as vLLM's renderer does.
    renders: bool = False


def parse(argv: Sequence[str]) -> Settings:
    """Return the settings that the command line asks for.

    Raises
    ------
    InvalidValue
        When flags contradict each other or a value cannot be used; wrong spelling ends in argparse's own message.
    """
    args = parser().parse_args(argv)
    limits = _limits(args)
    pace = Pace(
        shape=SHAPES[args.model_shape],
        gpu=ACCELERATORS[args.accelerator],
        gpus=args.gpus,
        prefill_rate=args.prefill_tokens_per_second,
        token_seconds=None if args.tokens_per_second is None else 1 / args.tokens_per_second,
    )
    return Settings(
        host=args.host,
        port=args.port,
        headless=args.headless,
        role=args.role,
        models=tuple(args.model),
        adapters=_adapters(args),
        connector=args.connector == "nixl",
        side_channel_port=args.side_channel_port,
        limits=limits,
        pace=pace,
        time_scale=args.time_scale,
        startup_seconds=args.startup_seconds,
        shutdown_timeout=args.shutdown_timeout,
        handshake_timeout=args.handshake_timeout,
        max_body_bytes=args.max_body_bytes,
        events=_events(args.kv_events_config),
        faults=faults.parse(args.fault),
        data_parallel=args.data_parallel_size,
        renders=args.enable_scale_out,
        tiers=_tiers(args, pace.transfer_bytes(1, args.block_size)),
        loading=args.kv_load,
        mixture=_mixture(args),
        drafting=None
        if args.speculative_config is None
        else drafting.parse(args.speculative_config, args.speculative_acceptance, args.speculative_draft_share),
    )


def _adapters(args: argparse.Namespace) -> dict[str, str]:
    """Return the adapters by name.

    Raises
    ------
    InvalidValue
        When one is not NAME=PATH, or adapters are not enabled.
    """
    if args.lora_modules and not args.enable_lora:
        raise InvalidValue("--lora-modules needs --enable-lora", "give both, as for vLLM")
    found = dict(item.partition("=")[::2] for item in args.lora_modules)
    if not all(found) or not all(found.values()):
        raise InvalidValue("--lora-modules takes NAME=PATH", "write it as for vLLM")
    return found


def _limits(args: argparse.Namespace) -> Limits:
    needed = -(-args.max_model_len // args.block_size)
    kv_blocks = max(Limits().kv_blocks, needed) if args.kv_blocks is None else args.kv_blocks
    if kv_blocks < needed:
        raise InvalidValue(
            f"--kv-blocks {kv_blocks} of {args.block_size} tokens hold less than --max-model-len {args.max_model_len}",
            "raise --kv-blocks or lower --max-model-len",
        )
    return Limits(
        block_size=args.block_size,
        kv_blocks=kv_blocks,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        lease_seconds=args.lease_seconds,
    )


def _tiers(args: argparse.Namespace, block: int) -> tuple[TierSettings, ...]:
    """Return the tiers of each rank, ``block`` bytes to a block.

    Raises
    ------
    InvalidValue
        When a further tier has no host tier before it, or one has no room for a block.
    """
    sizes = {kind: getattr(args, f"{kind}_kv_bytes") // args.data_parallel_size for kind in KINDS}
    asked = [kind for kind in KINDS if sizes[kind]]
    if asked and asked[0] != "host":
        raise InvalidValue(f"--{asked[0]}-kv-bytes needs --host-kv-bytes", "blocks go through the host's memory")
    small = next((kind for kind in asked if sizes[kind] < block), None)
    if small is not None:
        raise InvalidValue(f"--{small}-kv-bytes has no room for one block of {block} bytes", "make it larger")
    return tuple(
        TierSettings(kind, sizes[kind] // block, ASSUMED_SETUP[kind], getattr(args, f"{kind}_kv_bandwidth"))
        for kind in asked
    )


def _mixture(args: argparse.Namespace) -> Mixture | None:
    """Return how experts are spread; None where a GPU has all of them, which leaves nothing to balance."""
    ranks = args.gpus * args.data_parallel_size
    if not args.enable_expert_parallel or ranks < 2:
        if args.enable_eplb:
            raise InvalidValue(
                "--enable-eplb needs --enable-expert-parallel and several ranks", "spread experts over ranks first"
            )
        return None
    return mixture(ranks, args.experts, args.expert_skew, enabled=args.enable_eplb, config=args.eplb_config)


def parser() -> argparse.ArgumentParser:
    """Return the parser; names that vLLM has too mean the same here."""
    result = argparse.ArgumentParser(
        prog="twinpool-worker simulate",
        description="Serve an invented model over vLLM's HTTP interface: invented tokens, simulated times, no GPU.",
        allow_abbrev=False,
    )
    _add_identity(result)
    _add_ranks(result)
    _add_sizes(result)
    _add_times(result)
    _add_speculation(result)
    _add_tiers(result)
    result.add_argument("--kv-events-config", metavar="JSON", help="as vLLM's, publisher zmq")
    result.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="NAME[=N]",
        help="; ".join(
            [f"{name}: {what}" for name, what in faults.AT_START.items()]
            + [
                f"{name}{'=N' if valued else ''}: {what}"
                for name, (valued, what) in (faults.OF_ANSWER | faults.OF_EVENTS).items()
            ]
        ),
    )
    return result


def _add_identity(result: argparse.ArgumentParser) -> None:
    add = result.add_argument
    add("--host", default="127.0.0.1", help="address of HTTP and of the handoff's side channel")
    add("--port", type=_port, default=protocol.ENGINE_PORT)
    add("--role", choices=("prefill", "decode", "aggregated"), default="aggregated", help="shown in the log only")
    add("--model", "--served-model-name", nargs="+", required=True, metavar="NAME", help="ids that clients ask for")
    add("--enable-scale-out", action="store_true", help="answer .../render with token ids, as vLLM's renderer does")
    add("--enable-lora", action="store_true", help="serve adapters, which answer like the model")
    add("--lora-modules", nargs="+", default=[], metavar="NAME=PATH", help="nothing is read from there")
    add("--max-loras", type=_count, default=1, metavar="N", help="accepted; changes nothing")
    add("--max-lora-rank", type=_count, default=16, metavar="N", help="accepted; changes nothing")
    add("--connector", choices=("nixl", "none"), default="none", help="hand KV over as vLLM's NixlConnector does")
    add("--side-channel-port", type=_port, default=protocol.NIXL_SIDE_CHANNEL_PORT)


def _add_ranks(result: argparse.ArgumentParser) -> None:
    """Add how vLLM splits a model over nodes; the simulated ranks exchange nothing."""
    add = result.add_argument
    add("--pipeline-parallel-size", type=_count, default=1, metavar="N", help="accepted; changes nothing")
    add("--nnodes", type=_count, default=1, metavar="N", help="accepted; changes nothing")
    add("--node-rank", type=int, default=0, metavar="R", help="accepted; changes nothing")
    add("--master-addr", default="", help="not dialled")
    add("--master-port", type=_port, default=protocol.MASTER_PORT, help="not dialled")
    add("--enable-expert-parallel", action="store_true", help="steps wait for the rank with the busiest experts")
    add("--enable-eplb", action="store_true", help="move experts by their load, as vLLM does, once")
    add("--eplb-config", metavar="JSON", help="as vLLM's")
    add("--experts", type=_count, default=256, metavar="N", help="experts of a layer")
    add("--expert-skew", type=float, default=0.0, metavar="S", help="load falls with the power S of an expert's place")
    add("--data-parallel-size", type=_count, default=1, metavar="N", help="engines in this process, each its own cache")
    add("--data-parallel-size-local", type=_count, default=1, metavar="N", help="accepted; changes nothing")
    add("--data-parallel-start-rank", type=int, default=0, metavar="R", help="accepted; changes nothing")
    add("--data-parallel-address", default="", help="not dialled")
    add("--data-parallel-rpc-port", type=_port, default=protocol.DATA_PARALLEL_PORT, help="not dialled")
    add("--headless", action="store_true", help="a rank above 0: no HTTP, ends when asked")


def _add_sizes(result: argparse.ArgumentParser) -> None:
    add, default = result.add_argument, Limits()
    add("--block-size", type=_count, default=default.block_size, metavar="TOKENS")
    add(
        "--kv-blocks",
        "--num-gpu-blocks-override",
        type=_count,
        metavar="N",
        help="default: 4096, or more for one longest prompt",
    )
    add("--max-model-len", type=_count, default=default.max_model_len, metavar="TOKENS")
    add("--max-num-seqs", type=_count, default=default.max_num_seqs, metavar="N")
    add("--max-num-batched-tokens", type=_count, default=default.max_num_batched_tokens, metavar="TOKENS")
    add("--max-body-bytes", type=_count, default=16 * 2**20, metavar="BYTES", help="larger requests get HTTP 413")


def _add_times(result: argparse.ArgumentParser) -> None:
    add = result.add_argument
    add("--model-shape", choices=sorted(SHAPES), default="llama-3-8b", help="the model whose times are simulated")
    add("--accelerator", choices=sorted(ACCELERATORS), default="h100")
    add("--gpus", "--tensor-parallel-size", type=_count, default=1, metavar="N")
    add("--time-scale", type=_seconds, default=1.0, help="multiplies every simulated time; 0 waits for nothing")
    add("--tokens-per-second", type=_rate, metavar="N", help="decode speed of each request, instead of the model's")
    add("--prefill-tokens-per-second", type=_rate, metavar="N", help="prefill speed, instead of the model's")
    add("--startup-seconds", type=_seconds, default=0.0, metavar="S", help="how long the model 'loads'")
    add("--shutdown-timeout", type=_seconds, default=0.0, metavar="S", help="on SIGTERM, wait for running requests")
    add("--lease-seconds", type=_seconds, default=protocol.KV_LEASE_SECONDS, metavar="S", help="real seconds")
    add("--handshake-timeout", type=_seconds, default=5.0, metavar="S", help="after which a pull has failed")


def _add_speculation(result: argparse.ArgumentParser) -> None:
    add = result.add_argument
    add("--speculative-config", metavar="JSON", help="as vLLM's; every method drafts alike")
    add(
        "--speculative-acceptance",
        type=_share,
        default=0.6,
        metavar="P",
        help="share of right drafts, given those before",
    )
    add(
        "--speculative-draft-share",
        type=_share,
        default=0.0,
        metavar="C",
        help="time to draft a token, in decode steps",
    )


def _add_tiers(result: argparse.ArgumentParser) -> None:
    add = result.add_argument
    for kind in KINDS:
        add(f"--{kind}-kv-bytes", type=int, default=0, metavar="BYTES", help="KV tier of all ranks; 0: none")
        add(
            f"--{kind}-kv-bandwidth",
            type=_rate,
            default=ASSUMED_BANDWIDTH[kind],
            metavar="N",
            help="of the tier, bytes/s",
        )
    add(
        "--kv-load",
        choices=get_args(Loading),
        default="always",
        help="load what tiers hold always, as vLLM does, or only as far as that is faster than computing",
    )


def _events(text: str | None) -> EventSettings | None:
    """Read vLLM's ``--kv-events-config``; keys that it has and we do not need are refused, not ignored."""
    if text is None:
        return None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise InvalidValue(f"--kv-events-config is not JSON: {error}", "write it as for vLLM") from None
    known = {"enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "topic", "buffer_steps"}
    if not isinstance(config, dict) or not config.keys() <= known:
        raise InvalidValue("--kv-events-config has keys that are not known", f"known are: {', '.join(sorted(known))}")
    if config.get("publisher", "zmq") != "zmq":
        raise InvalidValue(f"--kv-events-config publisher {config['publisher']!r} is not known", "use zmq")
    if not config.get("enable_kv_cache_events"):
        return None
    return EventSettings(
        endpoint=str(config.get("endpoint", f"tcp://*:{protocol.KV_EVENTS_PORT}")),
        replay_endpoint=config.get("replay_endpoint"),
        topic=str(config.get("topic", "")),
        buffer_steps=int(config.get("buffer_steps", 10_000)),
    )


def _port(text: str) -> int:
    value = int(text)
    if not 0 < value < 65536:
        raise argparse.ArgumentTypeError(f"{text} is not a port")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1000000")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value

"""Steps as each strategy would make them over a link that carries gradients in turn."""

from __future__ import annotations

from instep.events import Event, Timeline

FORWARD, BACKWARD, UPDATE, HOST = 250.0, 500.0, 12.0, 3.0  # ms
NUM_PARAMETERS, MEGABYTES, MB_PER_MS, LATENCY = 48, 72.0, 0.119, 1.2
BUCKETS = {"naive": NUM_PARAMETERS, "flat": 1, "overlap": NUM_PARAMETERS, "bucketed": 12}


def made(strategy: str, slower: tuple[float, ...] = (1.0, 1.04), step: int = 7) -> Timeline:
    """One step of as many ranks as there are factors of ``slower``, by which each computes longer."""
    ranks = range(len(slower))
    begins = [1.7 * rank for rank in ranks]
    computed = [begins[rank] + 4 + (FORWARD + BACKWARD) * slower[rank] for rank in ranks]
    events = [event for rank in ranks for event in _computation(rank, begins[rank], slower[rank])]
    events += _loader(begins)
    count, free = BUCKETS[strategy], 0.0
    for bucket in range(count):
        ready = [computed[rank] - BACKWARD * slower[rank] * (1 - (bucket + 1) / count) for rank in ranks]
        began = [
            max(free, ready[rank] if strategy in ("overlap", "bucketed") else computed[rank])
            for rank in ranks
        ]
        together, last = max(began), began.index(max(began))
        agreed = together + LATENCY
        free = agreed + LATENCY + MEGABYTES / count / MB_PER_MS
        for rank in ranks:
            at = [ready[rank], began[rank], together, agreed, free]
            for name, start, end in zip(
                ("queued", "wait", "agree", "exchange"), at[:-1], at[1:], strict=True
            ):
                peer = last if name == "wait" else -1
                num_bytes = round(MEGABYTES / count * 1e6) if name == "exchange" else 0
                if name != "wait" or rank != last:
                    events.append(_event(rank, "communication", name, start, end, num_bytes, bucket, peer))
    for rank in ranks:
        events += [
            _event(rank, "host", "gradient sync", computed[rank], free),
            _event(rank, "compute", "update", free, free + UPDATE),
            _event(rank, "host", "ledger", free + UPDATE, free + UPDATE + HOST),
            _event(rank, "host", "step", begins[rank], free + UPDATE + HOST + begins[rank] / 10),
        ]
    return Timeline(_of_step(event, step) for event in events)


def _computation(rank: int, begin: float, slower: float) -> list[Event]:
    forward = begin + 4 + FORWARD * slower
    return [
        _event(rank, "compute", "forward", begin + 4, forward),
        _event(rank, "compute", "backward", forward, forward + BACKWARD * slower),
    ]


def _loader(begins: list[float]) -> list[Event]:
    return [_event(rank, "data", "data", begin, begin + 4) for rank, begin in enumerate(begins)]


def _event(
    rank: int,
    lane: str,
    name: str,
    start: float,
    end: float,
    num_bytes: int = 0,
    bucket: int = -1,
    peer: int = -1,
) -> Event:
    times = round(start * 1e6) + 10**12, round(end * 1e6) + 10**12
    return Event(rank, lane, name, *times, bytes=num_bytes, bucket=bucket, peer=peer)


def _of_step(event: Event, step: int) -> Event:
    return Event(
        event.rank, event.lane, event.name, event.start_ns, event.end_ns, event.bytes, step, 0, event.bucket,
        event.peer,
    )  # fmt: skip

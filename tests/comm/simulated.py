"""A network whose time is arithmetic: how long an algorithm takes if a message takes alpha + n beta.

Ranks are threads, messages are queues. A transfer begins when both sides have come to it, and occupies the
sender's way out and the receiver's way in; a rank's clock shows when it last was done with something.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from instep.comm.messages import Messages, flat

PATIENCE_S = 20.0


class Network:
    def __init__(self, size: int, alpha_s: float, beta_s: float) -> None:
        self.size, self.alpha_s, self.beta_s = size, alpha_s, beta_s
        pairs = [(source, to) for source in range(size) for to in range(size)]
        self.data: dict[tuple[int, int], queue.Queue] = {pair: queue.Queue() for pair in pairs}
        self.ready: dict[tuple[int, int], queue.Queue] = {pair: queue.Queue() for pair in pairs}

    def time_s(self, body: Callable[[Messages], None]) -> float:
        """When the last rank is done with ``body``, which all of them begin at 0."""
        ends: queue.Queue[float | BaseException] = queue.Queue()

        def live(rank: int) -> None:
            messages = SimulatedMessages(self, rank)
            try:
                body(messages)
                ends.put(messages.clock_s)
            except BaseException as error:
                ends.put(error)

        threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        clocks = []
        for _ in threads:
            end = ends.get(timeout=PATIENCE_S)
            if isinstance(end, BaseException):
                raise end
            clocks.append(end)
        for thread in threads:
            thread.join()
        return max(clocks)


class SimulatedMessages(Messages):
    def __init__(self, network: Network, rank: int) -> None:
        super().__init__(None, range(network.size))
        self.network, self.rank, self.size = network, rank, network.size
        self.clock_s = 0.0

    def together(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
        """One after the other on the way out, and on the way in, in the order that is given."""
        network, out_s, in_s = self.network, self.clock_s, self.clock_s
        for k in range(max(len(sends), len(receives))):
            outgoing = [(x, to) for x, to in sends[k : k + 1] if x.numel()]
            incoming = [(x, source) for x, source in receives[k : k + 1] if x.numel()]
            for x, to in outgoing:
                network.data[self.rank, to].put((flat(x).clone(), out_s))
                self.num_messages += 1
                self.bytes_sent += x.numel() * x.element_size()
            for x, source in incoming:
                network.ready[source, self.rank].put(in_s)
                content, sender_s = network.data[source, self.rank].get(timeout=PATIENCE_S)
                assert len(content) == x.numel(), "both sides name one length"
                flat(x).copy_(content)
                in_s = self._after(max(in_s, sender_s), x)
            for x, to in outgoing:
                out_s = self._after(max(out_s, network.ready[self.rank, to].get(timeout=PATIENCE_S)), x)
        self.clock_s = max(out_s, in_s)

    def _after(self, start_s: float, x: Tensor) -> float:
        return start_s + self.network.alpha_s + x.numel() * x.element_size() * self.network.beta_s

"""The best bucket size by arithmetic: how long backward is followed by communication that nothing hides.

A message of s bytes takes a + b s seconds: a latency (alpha) and a time per byte (beta). Backward takes T_b
and yields its S bytes of gradients evenly. They leave in buckets of s bytes, one after the other:

    backward  |=====|=====|=====|=====|                       T_b in all, a bucket full after every T_b s/S
    network         |--b0--|--b1--|--b2--|--b3--|             a + b s each
                                        |<----->| exposed     what the step waits for

    comm-bound, b S > T_b: the network never idles after the first bucket, so

        exposed(s) = T_b s/S  +  (S/s) a + b S  -  T_b
                     wait for    all buckets       was hidden
                     the first

    compute-bound: the network keeps up as long as a bucket travels faster than the next one fills,
    a + b s <= T_b s/S; then only the last is exposed: a + b s.

    in general the larger of the two.

The first falls and rises: small buckets pay a latency each, large ones start late. Its least is at
s = S sqrt(a / T_b). The second only rises, so the best size is the smallest with which the network keeps up,
s = a S / (T_b - b S), if that is smaller still.

What the model leaves out: on one host, communication takes processor time and memory bandwidth from backward.

Source: the uniform case of S. Shi et al., "MG-WFBP", INFOCOM 2019. Units: seconds, bytes.
"""

from __future__ import annotations

import math

from instep.timeline.predict import Cost


def comm_bound_s(bucket: float, total: float, backward_s: float, link: Cost) -> float:
    """Exposed communication if the network is busy from the first bucket on, in seconds."""
    num_buckets = total / bucket
    return backward_s / num_buckets + num_buckets * link.latency_s + link.s_per_byte * total - backward_s


def compute_bound_s(bucket: float, link: Cost) -> float:
    """Exposed communication if the network has caught up when the last bucket is full, in seconds."""
    return link.time_s(bucket)


def exposed_s(bucket: float, total: float, backward_s: float, link: Cost) -> float:
    """Communication that the step waits for, with buckets of ``bucket`` of the ``total`` bytes, in seconds.

    A bucket that is larger than the whole is the whole.
    """
    bucket = min(bucket, total)
    return max(comm_bound_s(bucket, total, backward_s, link), compute_bound_s(bucket, link))


def best_bucket(total: float, backward_s: float, link: Cost) -> float:
    """The bucket size in bytes with the least exposed communication; at most ``total``."""
    balanced = total * math.sqrt(link.latency_s / backward_s)
    spare_s = backward_s - link.s_per_byte * total
    if spare_s > 0:  # compute-bound
        balanced = min(balanced, link.latency_s * total / spare_s)
    return min(balanced, total)

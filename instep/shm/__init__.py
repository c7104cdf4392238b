"""A torch.distributed backend for ranks that share a host: ``import instep.shm`` registers it as "shm".

    import instep.shm
    torch.distributed.init_process_group("shm")        # or new_group(backend="shm")

Where the ranks of a group turn out not to share a host, and on any platform but Linux on x86-64 (or aarch64
with the native core), the group is one of gloo, and rank 0 says so once.
"""

from instep.shm.backend import ShmGroup
from instep.shm.handshake import connect, register, share

__all__ = ["ShmGroup", "connect", "register", "share"]

register()

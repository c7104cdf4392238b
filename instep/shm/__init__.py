"""A torch.distributed backend for ranks that share a host: ``import instep.shm`` registers it as "shm".

    import instep.shm
    torch.distributed.init_process_group("shm")        # or new_group(backend="shm")

It needs Linux and the native core. Where ranks do not share a host, or one of them lacks either, the group is
one of gloo, and rank 0 says so once.
"""

from instep.shm.backend import ShmGroup
from instep.shm.handshake import connect, register, share

__all__ = ["ShmGroup", "connect", "register", "share"]

register()

"""The native core: waiting and adding in shared memory without the interpreter."""

"""Memory in pages of 2 MiB: filling gigabytes of weights takes fewer page faults, reading them fewer look-ups."""

import os


def use_huge_pages() -> None:
    """Ask torch to ask for them, for every tensor on the CPU of 2 MiB and more; a kernel without them changes nothing.

    torch looks at this variable once, so call it before the first tensor is made. A user's own setting stays.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

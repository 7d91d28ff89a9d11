"""What happens to one arena's entries, told to other processes through a ring in shared memory.

``ring`` has the memory and its argument, ``follow`` what a reader does with it, ``claimed`` what that has claimed.
Nothing here does I/O.
"""

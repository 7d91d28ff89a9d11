"""A throw-away virtual machine with real RDMA verbs, for the tests in this folder and for trying things by hand.

    python -m tests.rdma_vm --pairs 1 -- ibv_devinfo          (scripts/test-rdma does all of it)

The kernel of most machines that run tests has no RDMA driver and may load none. Debian's and Ubuntu's kernel packages
have ``rdma_rxe``, which is RDMA over Converged Ethernet in software: the same verbs, queue pairs and memory regions as
on a card, over any network interface. QEMU boots it within seconds, without KVM too.

The modules, from the bottom up: ``packages`` (what must be installed), ``kernel`` (fetches a kernel package and unpacks
it into the cache), ``modules`` (which of its modules, in which order), ``initramfs`` (the archive that the kernel boots
from), ``qemu`` (what a machine shall have; its command line), ``boot`` (starts and supervises), ``__main__``.
``guest/`` is what runs inside: README.md has the picture.
"""

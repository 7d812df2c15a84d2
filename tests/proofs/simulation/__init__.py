"""Imports in a simulated world: clock, threads, storage and server are simulated, the product is real.

``python -m tests.proofs.simulation`` runs seeds; ``--seed 17`` prints every step of every thread, and the log
of the product. The same seed on the same tree always gives the same trace. ``python -m
tests.proofs.simulation.mutants`` removes one protection after the other, and prints how many seeds it took
until one broke the law.

Not simulated: qemu-img and other programs, sockets and TLS, archives, scratch space, a delta on a device, and
sources other than HTTP. Disks have up to 4 MiB of data; some of qcow2 have it on both sides of the border of
4 GiB. A granule of the journal has up to 32 units, because the world sets a lower number of granules. Threads
change only at locks, waits and system calls. All nodes see the same page cache of a device. Without a lock
that keeps the other node out, a write that was on its way when its process was stopped is excused: only
fencing in the storage could prevent it.
"""

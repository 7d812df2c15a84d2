"""Power cuts: every write and flush of real imports onto real devices and file systems is recorded.

The states are those that a power cut could leave: all writes before a flush, and of those after it none,
some, in any order, or parts of them. No such state may show an accepted disk that is not whole, the state
after the last flush must hold the disk, and running the import again must write it. A disk is accepted on a
file system if it has its name, and on a device if its first sector with data is there.
"""

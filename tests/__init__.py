"""The tests, and the servers, devices and disks that they need."""

"""Disks in an OVA. No kind of source of its own: the OVA may be at any source."""

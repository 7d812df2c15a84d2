"""Disks in packages: OVA and OCI archives. No kind of source of its own: a package may be at any source."""

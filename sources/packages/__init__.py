"""Disks in packages: OVA and OCI archives. They are not kinds of sources: any may serve one."""

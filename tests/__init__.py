"""Tests, with the servers, devices and disks they need in ``support``."""

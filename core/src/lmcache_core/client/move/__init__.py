"""Bytes to and from the slots: leases, copies, and jobs over pages."""

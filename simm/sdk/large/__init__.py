"""Values above ``VALUE_BYTES_MAX``: stored in parts, and read as one."""

"""Small, full, read-only and slow disks."""

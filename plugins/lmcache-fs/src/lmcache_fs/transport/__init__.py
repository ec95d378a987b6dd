"""Around the files of a disk tier: where they are, how they are written, and which adapter leads."""

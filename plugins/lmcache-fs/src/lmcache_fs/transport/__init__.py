"""What stands around the files of a disk tier: their places, the way they are written, and who leads."""

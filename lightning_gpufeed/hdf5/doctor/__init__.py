"""What is wrong with a file, a folder or the machine, and the line that cures it."""

"""How samples are read: from the mapped file, by many reads in one call, by whole decoded chunks, through h5py."""

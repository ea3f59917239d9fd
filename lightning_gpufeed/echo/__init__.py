"""Data echoing: each fetched batch is used several times on the device."""

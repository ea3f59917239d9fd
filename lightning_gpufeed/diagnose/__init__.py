"""Why a training step waits: counters, a verdict, and what each cure would gain."""

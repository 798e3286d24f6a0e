"""Is this installation healthy: versions, devices, paths taken, and a self-test of every operator."""

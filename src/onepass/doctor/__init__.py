"""A health check of the installation: versions, devices, paths taken, and a self-test of every operator."""

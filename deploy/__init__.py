"""Running the parties: local launcher, examples, trial certificates and container images."""

"""How the parties are run: the local launcher, the examples, the container images."""

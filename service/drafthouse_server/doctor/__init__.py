"""What `drafthouse doctor` tells: the build, the machine, the model's needs, and what is wrong."""

"""What the tests share: tiny backbones and sweeps, moments of running programs, servers on loopback."""

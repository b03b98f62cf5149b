"""What the demo and the tests stand on: real servers, and a network that can be broken."""

"""Every statement that runs, one named constant per verb, each with what it locks and why that is safe."""

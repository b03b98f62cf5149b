"""Sends records to Kafka: the seam, what stands behind it, and what its errors mean."""

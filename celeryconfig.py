"""The deployment's settings. Every OUTBOX_X of the environment is read as outbox_x, with or without this file."""

import os

broker_url = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0")
result_backend = os.environ.get("CELERY_RESULT_BACKEND", broker_url)

outbox_database_url = os.environ.get("OUTBOX_DATABASE_URL", "postgresql://localhost/postgres")
outbox_bootstrap_servers = os.environ.get("OUTBOX_BOOTSTRAP_SERVERS", "localhost:9092")

"""The loops: dispatch, retry, flush. Plain functions; Celery is nowhere here."""

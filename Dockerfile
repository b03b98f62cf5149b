# One image for everything of the relay: worker, beat, Flower and the one-shot commands.

FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY outbox_tasks ./outbox_tasks
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
ENV PYTHONUNBUFFERED=1
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt "$(ls /tmp/wheels/*.whl)[confluent]" \
    && rm -r /tmp/wheels /tmp/constraints.txt \
    && useradd --system --uid 10001 --create-home outbox
# Celery reads celeryconfig.py from the working directory.
WORKDIR /app
COPY celeryconfig.py ./
USER outbox
CMD ["celery", "-A", "outbox_tasks", "worker", "--loglevel=INFO"]

#!/bin/sh
# One answer at once and one as a stream, with curl: sh curl.sh [http://localhost:8000] [model]
set -eu
url="${1:-http://localhost:8000}/v2/models/${2:-deepinfer}"

curl --fail-with-body --silent --show-error --max-time 60 "$url/generate" \
  --data '{"text_input": "The capital of Italy is", "max_tokens": 8, "temperature": 0}'
echo

curl --fail-with-body --silent --show-error --max-time 60 --no-buffer "$url/generate_stream" \
  --data '{"text_input": "The capital of Italy is", "max_tokens": 8, "temperature": 0, "stream": true}'

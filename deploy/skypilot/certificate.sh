#!/usr/bin/env bash
# A certificate for this machine's public address, signed by the run's own authority:
#   REPLICA_CA_CERT=… REPLICA_CA_KEY=… certificate.sh ADDRESS FOLDER
# leaves key.pem and cert.pem in FOLDER. The authority is made once, on your machine: README.md.
set -euo pipefail
address="$1"
folder="$2"
umask 077
mkdir -p "$folder"
cd "$folder"
trap 'rm -f ca-key.pem ca.pem request.pem extensions.conf' EXIT

printf '%s\n' "$REPLICA_CA_CERT" > ca.pem
printf '%s\n' "$REPLICA_CA_KEY" > ca-key.pem
printf 'subjectAltName=IP:%s\nextendedKeyUsage=serverAuth\n' "$address" > extensions.conf
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes \
    -subj /CN=bucket-lora-replica -keyout key.pem -out request.pem 2> /dev/null
# CA:FALSE follows from the missing basicConstraints; 30 days are longer than a spot machine lives.
openssl x509 -req -in request.pem -CA ca.pem -CAkey ca-key.pem -CAcreateserial -days 30 \
    -extfile extensions.conf -out cert.pem 2> /dev/null
rm -f ca.srl

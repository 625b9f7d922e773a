#!/usr/bin/env bash
# Makes the certificates of a trial installation with openssl, and prints the commands that hand them to the cluster.
#
#   deploy/make-certs.sh FOLDER [--server ADDRESS[,ADDRESS…]] [--node NAME[,NAME…]] [--reader NAME[,NAME…]]
#
# FOLDER gets a certificate authority (kept from run to run, so that nodes can be added later), one certificate for the
# control plane that names every ADDRESS, one for each node, and one for each reader. A node's identity is the URI
# headgate://node/NAME in its certificate; a reader has none, and may look with headgatectl and follow no stream. The
# authority's key stays in FOLDER: it belongs into no cluster.
set -euo pipefail

usage() { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
fail() { printf 'make-certs: %s\n' "$*" >&2; exit 1; }

(($# >= 1)) && [[ $1 != -* ]] || usage
folder=$1; shift
servers=() nodes=() readers=()
while (($#)); do
  (($# >= 2)) || usage
  case $1 in
    --server) IFS=, read -r -a more <<<"$2"; servers+=("${more[@]}") ;;
    --node) IFS=, read -r -a more <<<"$2"; nodes+=("${more[@]}") ;;
    --reader) IFS=, read -r -a more <<<"$2"; readers+=("${more[@]}") ;;
    *) usage ;;
  esac
  shift 2
done
((${#servers[@]} || ${#nodes[@]} || ${#readers[@]})) || usage
command -v openssl >/dev/null || fail "openssl is missing (Debian package openssl)"

umask 077
mkdir -p "$folder/control-plane" "$folder/nodes" "$folder/readers"
authority_days=3650
certificate_days=365

if [[ ! -f $folder/ca.key ]]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -sha256 -days "$authority_days" \
    -subj "/CN=headgate trial authority" -addext "basicConstraints=critical,CA:TRUE" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" -keyout "$folder/ca.key" -out "$folder/ca.crt" 2>/dev/null \
    || fail "openssl could not make the authority"
fi

# issue FILE COMMON-NAME SUBJECT-ALT-NAMES EXTENDED-KEY-USAGE
issue() {
  local file=$1 name=$2 alternatives=$3 usage=$4 extensions
  extensions=$(printf '%s\n' "subjectAltName=$alternatives" "extendedKeyUsage=$usage" \
    "keyUsage=critical,digitalSignature" "basicConstraints=critical,CA:FALSE")
  openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -sha256 -subj "/CN=$name" \
    -keyout "$file.key" -out "$file.csr" 2>/dev/null || fail "openssl could not make a request for $name"
  openssl x509 -req -sha256 -days "$certificate_days" -in "$file.csr" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" \
    -CAcreateserial -extfile <(printf '%s\n' "$extensions") -out "$file.crt" 2>/dev/null \
    || fail "openssl could not sign the certificate of $name"
  rm -f "$file.csr"
}

if ((${#servers[@]})); then
  alternatives=
  for server in "${servers[@]}"; do
    if [[ $server =~ ^[0-9.]+$ || $server == *:* ]]; then kind=IP; else kind=DNS; fi
    alternatives+="${alternatives:+,}$kind:$server"
  done
  issue "$folder/control-plane/tls" headgate-control-plane "$alternatives" serverAuth
  cp "$folder/ca.crt" "$folder/control-plane/ca.crt"
fi
for node in "${nodes[@]}"; do
  [[ $node =~ ^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$ ]] || fail "$node is no node name: lower-case letters, digits, - and ."
  issue "$folder/nodes/$node" "$node" "URI:headgate://node/$node" clientAuth
done
for reader in "${readers[@]}"; do
  [[ $reader =~ ^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$ ]] || fail "$reader is no name: lower-case letters, digits, - and ."
  issue "$folder/readers/$reader" "$reader" "URI:headgate://reader/$reader" clientAuth
done
cp "$folder/ca.crt" "$folder/nodes/ca.crt"

cat <<END
Made in $folder, valid for $certificate_days days. Hand them to the cluster (again after each change; nothing restarts):

  kubectl -n headgate-system create secret generic headgate-control-plane-tls \\
    --from-file=$folder/control-plane --dry-run=client -o yaml | kubectl apply -f -
  kubectl -n headgate-system create secret generic headgate-node-agent-tls \\
    --from-file=$folder/nodes --dry-run=client -o yaml | kubectl apply -f -
END

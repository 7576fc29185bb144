#!/bin/sh
# Makes the authority and the certificate of tests, for a hundred years: `sh tests/certificates/make.sh`
set -eu
cd "$(dirname "$0")"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 -subj "/CN=Tests of Trouper" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign -keyout ca-key.pem -out ca.pem
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=images.test -keyout server-key.pem -out server.csr
cat > extensions <<END
subjectAltName=DNS:images.test,DNS:*.cdn.test
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage=serverAuth
authorityKeyIdentifier=keyid
END
openssl x509 -req -in server.csr -CA ca.pem -CAkey ca-key.pem -CAcreateserial -days 36500 -extfile extensions -out server.pem
cat server-key.pem >> server.pem
rm -f ca-key.pem server-key.pem server.csr extensions ca.srl

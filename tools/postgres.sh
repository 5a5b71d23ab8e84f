#!/bin/sh
# Installs Debian's PostgreSQL server where it is missing, apt is there and we are root. The tests start throw-away
# servers of their own from its binaries, so no cluster is made and no service is left running. Elsewhere it says why
# not, and the tests that need a server are skipped.
set -e
if ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null 2>&1; then
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
    echo "no PostgreSQL server here, and none can be installed without apt and root: its tests are skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends postgresql-common >/dev/null
mkdir -p /etc/postgresql-common
echo "create_main_cluster = false" >>/etc/postgresql-common/createcluster.conf
apt-get install -y -qq --no-install-recommends postgresql >/dev/null

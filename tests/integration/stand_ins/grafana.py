"""Stands in for Grafana's server: answers its health route and tells what was mounted for it.

There is no Debian package of Grafana; what this checks is the compose file's part: networks, mounts,
provisioning files, the password.
"""

import json
import os
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

PROVISIONING = Path("/etc/grafana/provisioning")


def found() -> dict[str, object]:
    """What a Grafana would have read at its start."""
    provider = (PROVISIONING / "dashboards" / "loadpeak.yml").read_text()
    folder = next(line.split(":")[1].strip() for line in provider.splitlines() if "path:" in line)
    source = (PROVISIONING / "datasources" / "prometheus.yml").read_text()
    url = next(line.split(":", 1)[1].strip() for line in source.splitlines() if "url:" in line)
    with urllib.request.urlopen(url + "/api/v1/query?query=up", timeout=5) as answer:
        up = json.load(answer)["status"]
    home = Path(os.environ["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    return {
        "dashboards": {
            path.name: json.loads(path.read_text())["uid"] for path in Path(folder).glob("*.json")
        },
        "home": json.loads(home.read_text())["title"],
        "datasource": up,
        "password": len(os.environ["GF_SECURITY_ADMIN_PASSWORD"]),
        "writable": os.access("/var/lib/grafana", os.W_OK),
    }


class Handler(BaseHTTPRequestHandler):
    """``/api/health`` and ``/found``."""

    def do_GET(self) -> None:
        body = json.dumps({"database": "ok"} if self.path == "/api/health" else found()).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    HTTPServer(("0.0.0.0", 3000), Handler).serve_forever()

#!/usr/bin/env bash
# Prints the name of the interface that has the default route: the first of the best metric.
set -euo pipefail
ip -4 -oneline route show default | awk '
    {
        metric = 0
        for (i = 1; i < NF; i++) {
            if ($i == "dev") name = $(i + 1)
            if ($i == "metric") metric = $(i + 1)
        }
        if (best == "" || metric + 0 < least) { best = name; least = metric + 0 }
    }
    END { if (best == "") exit 1; print best }'

#!/usr/bin/env bash
# The gate of action.yml; it runs anywhere:
#   MODEL=my_model.py:build DATA=photos FAIL_ABOVE=psnr=20 FLAGS="--defences noise=0.1" bash scripts/gate.sh
# The exit status is that of `situs audit`: 0 passed, 3 above, 4 inconclusive (not a pass), 2 a mistake.
set -euo pipefail
: "${MODEL:?the model to audit}" "${DATA:?a folder of images, or a .txt file}"
out=${OUT:-situs-gate}
verb=gradients
[[ $DATA == *.txt ]] && verb=texts
read -r -a flags <<<"${FLAGS:-}"
mkdir -p "$out"
status=0
situs audit "$verb" "$MODEL" --data "$DATA" --fail-above "${FAIL_ABOVE:-blind}" ${flags[@]+"${flags[@]}"} \
    --no-pictures --out "$out" --junit "$out/gate.xml" 2>&1 | tee "$out/gate.txt" || status=$?
case $status in 0) outcome=passed ;; 3) outcome=above ;; 4) outcome=inconclusive ;; *) outcome=error ;; esac
echo "situs gate: $outcome"
echo "outcome=$outcome" >>"${GITHUB_OUTPUT:-/dev/null}"
{ echo "### situs gate: $outcome"; echo '```'; cat "$out/gate.txt"; echo '```'; } >>"${GITHUB_STEP_SUMMARY:-/dev/null}"
exit "$status"

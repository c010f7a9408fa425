#!/bin/sh
#SBATCH --job-name=weighin
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --output=weighin-%a.log
#
# Measures one shard of a suite per job of a Slurm array, and needs no Ray. The last argument is the
# number of shards:
#   sbatch --array=1-8 slurm-array.sh suite.yaml /shared/run 8
# A job that is requeued resumes its shard. To submit one shard again:
#   sbatch --array=3 slurm-array.sh suite.yaml /shared/run 8
# When all jobs have ended:
#   mkdir /shared/run/whole
#   cat /shared/run/shard-*/records.jsonl > /shared/run/whole/records.jsonl
#   cp -r /shared/run/shard-*/samples /shared/run/whole
#   weighin report /shared/run/whole
set -eu
suite=$1
folder=$2
count=$3
shard=$SLURM_ARRAY_TASK_ID
run=$folder/shard-$shard

mkdir -p "$folder"
if [ -e "$run/plan.json" ]; then
    exec weighin bench --resume "$run" --set wait=true
fi
exec weighin bench --suite "$suite" --set "shard=$shard/$count" --out "$run" --set wait=true

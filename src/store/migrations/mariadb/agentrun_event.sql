-- What happened in a run: run is its uid, payload is not sealed.
CREATE TABLE IF NOT EXISTS tx_nrllm_agentrun_event (
    uid bigint NOT NULL AUTO_INCREMENT PRIMARY KEY,
    pid bigint NOT NULL DEFAULT 0,
    run bigint NOT NULL DEFAULT 0,
    sequence bigint NOT NULL DEFAULT 0,
    kind varchar(32) NOT NULL DEFAULT '',
    payload mediumtext,
    crdate bigint NOT NULL DEFAULT 0
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci;
CREATE INDEX IF NOT EXISTS tx_nrllm_agentrun_event_run ON tx_nrllm_agentrun_event (run);

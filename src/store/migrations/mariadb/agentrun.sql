-- The agent runs of nr_llm, for those who have no TYPO3 to make the table.
CREATE TABLE IF NOT EXISTS tx_nrllm_agentrun (
    uid bigint NOT NULL AUTO_INCREMENT PRIMARY KEY,
    pid bigint NOT NULL DEFAULT 0,
    uuid varchar(36) NOT NULL DEFAULT '',
    status varchar(32) NOT NULL DEFAULT 'queued',
    configuration_uid bigint NOT NULL DEFAULT 0,
    configuration_identifier varchar(150) NOT NULL DEFAULT '',
    be_user bigint NOT NULL DEFAULT 0,
    iterations bigint NOT NULL DEFAULT 0,
    truncated smallint NOT NULL DEFAULT 0,
    total_prompt_tokens bigint NOT NULL DEFAULT 0,
    total_completion_tokens bigint NOT NULL DEFAULT 0,
    total_tokens bigint NOT NULL DEFAULT 0,
    estimated_cost decimal(10,6) NOT NULL DEFAULT 0,
    error_class varchar(255) NOT NULL DEFAULT '',
    termination_reason varchar(64) NOT NULL DEFAULT '',
    -- Sealed while a run waits for a human, kept while it runs again, '' once it has ended.
    suspended_state mediumtext,
    -- Sealed from the first moment, kept while the run is queued and runs, '' once it has ended.
    queued_request mediumtext,
    claimed_by varchar(64) NOT NULL DEFAULT '',
    lease_expires bigint NOT NULL DEFAULT 0,
    requeue_count bigint NOT NULL DEFAULT 0,
    pending_effect smallint NOT NULL DEFAULT 0,
    started_at bigint NOT NULL DEFAULT 0,
    finished_at bigint NOT NULL DEFAULT 0,
    tstamp bigint NOT NULL DEFAULT 0,
    crdate bigint NOT NULL DEFAULT 0
) ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci;
CREATE UNIQUE INDEX IF NOT EXISTS tx_nrllm_agentrun_uuid ON tx_nrllm_agentrun (uuid);
CREATE INDEX IF NOT EXISTS tx_nrllm_agentrun_status ON tx_nrllm_agentrun (status, crdate);

//! Agents stop, crash and start again, with and without a control plane.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use headgate_tests::testbed::{AgentSetup, Testbed, client::HeldConnection};

use super::node::{
    Dump, NODE, Writes, agent_log, expect_servers, forget_rules, on_machines, rules, state_file, targets,
    wait_for_answers, wait_until, while_asking,
};

fn start(bed: &Testbed, writes: &Writes) -> Result<()> {
    bed.start_programs(NODE, &writes.setup())
}

/// The machine reboots while no control plane answers. The node forwards with the state from disk,
/// and receives the missed changes once a control plane answers.
fn cold_start(bed: &Testbed) -> Result<()> {
    let writes = Writes::watch(bed)?;
    // An agent without any state writes nothing before it has received everything from a control
    // plane.
    bed.start_agent_with(NODE, &writes.setup())?;
    wait_until("the agent's first attempt to connect", || Ok(agent_log(bed)?.contains("the stream ended")))?;
    ensure!(
        writes.count()? == 0 && !rules(bed)?.contains("KUBE-"),
        "rules were written before the agent had any state"
    );
    bed.start_control_plane()?;
    bed.wait_programmed()?;
    expect_servers(bed, "steady", &["a1", "b1"])?;
    let before = rules(bed)?;

    bed.stop_agent(NODE)?;
    bed.stop_control_plane()?;
    forget_rules(bed)?;
    bed.start_agent_with(NODE, &writes.setup())?;
    wait_for_answers(bed, "steady")?;
    expect_servers(bed, "steady", &["a1", "b1"])?;
    expect_servers(bed, "other", &["c1"])?;
    // A family may be programmed later than the other one.
    let mut after = String::new();
    let are_same = wait_until("the rules from disk are complete", || {
        after = rules(bed)?;
        Ok(before == after)
    });
    are_same.with_context(|| format!("the rules before were\n{before}\nand the rules from disk are\n{after}"))?;

    bed.write_endpoints("steady", &["a2"])?;
    writes.take_input()?;
    bed.start_control_plane()?;
    bed.wait_programmed()?;
    expect_servers(bed, "steady", &["a2"])?;
    let input = writes.take_input()?;
    ensure!(
        input.contains("testbed/steady") && !input.contains("testbed/other"),
        "more than the change was written:\n{input}"
    );
    let agent = bed.agents()?.into_iter().find(|agent| agent.node == NODE).context("the agent is not connected")?;
    ensure!(agent.resume == "digests", "resumed by {:?}", agent.resume);
    Ok(())
}

/// The agent restarts although nothing has changed. The agent writes no rules, and no connection is
/// lost.
fn warm_restart(bed: &Testbed) -> Result<()> {
    let writes = Writes::watch(bed)?;
    start(bed, &writes)?;
    let mut held = targets(bed, "steady")?
        .into_iter()
        .map(|(from, to)| HeldConnection::open(bed.machines().machine(from)?, to))
        .collect::<Result<Vec<_>>>()?;
    let before = writes.count()?;
    ensure!(before > 0, "no writes were recorded during the first start");
    while_asking(bed, "steady", || {
        for is_killed in [false, true] {
            if is_killed {
                bed.kill_agent(NODE)?;
            } else {
                bed.stop_agent(NODE)?;
            }
            expect_servers(bed, "steady", &["a1", "b1"])?;
            bed.start_programmed(NODE, &writes.setup())?;
            let input = writes.take_input()?;
            ensure!(writes.count()? == before, "the restarted agent wrote:\n{input}");
            let agents = bed.agents()?;
            let agent = agents.iter().find(|agent| agent.node == NODE).context("the agent is not connected")?;
            ensure!(
                agent.resumed_resources == 0,
                "{} resources were sent, resumed by {}",
                agent.resumed_resources,
                agent.resume
            );
        }
        // Restart while the control plane is stopped.
        bed.stop_control_plane()?;
        bed.kill_agent(NODE)?;
        bed.start_agent_with(NODE, &writes.setup())?;
        wait_until("the agent to check the rules", || {
            Ok(agent_log(bed)?.contains("the agent does not change them until"))
        })?;
        ensure!(writes.count()? == before, "the agent wrote without a control plane:\n{}", writes.take_input()?);
        bed.start_control_plane()?;
        bed.wait_programmed()?;
        ensure!(
            writes.count()? == before,
            "the agent wrote after the control plane returned:\n{}",
            writes.take_input()?
        );
        Ok(())
    })?;
    held.iter_mut().try_for_each(HeldConnection::check).context("after restarts")?;
    // A removed endpoint keeps its established connections.
    bed.write_endpoints("steady", &["a2"])?;
    bed.wait_programmed()?;
    bed.kill_agent(NODE)?;
    bed.start_programmed(NODE, &writes.setup())?;
    expect_servers(bed, "steady", &["a2"])?;
    held.iter_mut().try_for_each(HeldConnection::check).context("after the endpoints were replaced")
}

/// While no agent runs, another program restores rules that it saved earlier: with an agent that
/// ended and saved its state, and after a reboot. The next agent starts without a control plane.
fn restored_dump(bed: &Testbed) -> Result<()> {
    bed.start_programs(NODE, &AgentSetup::default())?;
    let dump = Dump::save(bed)?;
    bed.write_endpoints("steady", &["a2"])?;
    bed.wait_programmed()?;
    let run = state_file(bed).with_file_name("run");
    for is_rebooted in [false, true] {
        if is_rebooted {
            // The agent has saved its state, and is killed later.
            wait_until("the run to be recorded", || Ok(!fs::read_to_string(&run)?.starts_with("saved")))?;
            bed.kill_agent(NODE)?;
            fs::write(&run, "00000000-0000-0000-0000-000000000000\n").context("writing the boot")?;
        } else {
            bed.stop_agent(NODE)?;
            bed.stop_control_plane()?;
        }
        dump.restore(bed)?;
        expect_servers(bed, "steady", &["a1", "b1"]).context("with the restored rules")?;
        bed.start_agent(NODE)?;
        wait_until("the saved state to replace the restored rules", || {
            Ok(expect_servers(bed, "steady", &["a2"]).is_ok())
        })?;
        expect_servers(bed, "other", &["c1"])?;
    }
    Ok(())
}

on_machines! {
    // rows of iptables: 91, 92
    cold_start_legacy: IptablesLegacy, cold_start;
    // rows of iptables: 91, 92
    cold_start_nft: IptablesNft, cold_start;
    // rows of iptables: 89, 92
    warm_restart_legacy: IptablesLegacy, warm_restart;
    // rows of iptables: 89, 92
    warm_restart_nft: IptablesNft, warm_restart;
    restored_dump_legacy: IptablesLegacy, restored_dump;
    restored_dump_nft: IptablesNft, restored_dump;
}

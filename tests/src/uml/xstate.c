/*
 * A library for linux.uml, loaded with LD_PRELOAD. It lets User-Mode Linux set the registers of
 * processors that have more registers than User-Mode Linux supports.
 *
 * User-Mode Linux 6.1 keeps at most 2,696 bytes of a process's extended registers (up to AVX-512
 * and protection keys). The host's PTRACE_SETREGSET accepts only the whole XSAVE area, which is
 * 11,008 bytes on processors with AMX. For a smaller area, it fails with EFAULT (xstateregs_set in
 * arch/x86/kernel/fpu/regset.c). User-Mode Linux then prints "ptrace set fp regs failed, errno =
 * 14" and panics. This library extends the area to its whole length with zeros, the initial state
 * of the additional registers. No program inside uses these registers.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

static long (*next_ptrace)(int, ...);
/* The area is static because linux.uml calls ptrace with a small stack, and has one thread. */
static char area[65536] __attribute__((aligned(64)));
static size_t area_size;

__attribute__((constructor)) static void find_next(void)
{
	next_ptrace = (long (*)(int, ...))dlsym(RTLD_NEXT, "ptrace");
}

/*
 * User-Mode Linux reads these registers after each stop of a process, and sets them before it lets
 * the process continue. After a system call they are usually unchanged, and setting them is slow. So
 * the library remembers what the stopped process holds, and skips a call that would change nothing.
 */
static struct {
	int pid;
	size_t length;
	char registers[4096];
} held;

static int holds(int pid, const struct iovec *given)
{
	return held.length != 0 && held.pid == pid && held.length <= given->iov_len &&
	       memcmp(held.registers, given->iov_base, held.length) == 0;
}

static void remember(int pid, const struct iovec *given)
{
	held.length = 0;
	if (given->iov_len <= sizeof(held.registers)) {
		memcpy(held.registers, given->iov_base, given->iov_len);
		held.pid = pid;
		held.length = given->iov_len;
	}
}

static long set_registers(int pid, const struct iovec *given)
{
	struct iovec whole = { area, sizeof(area) };
	if (area_size == 0) {
		if (next_ptrace(PTRACE_GETREGSET, pid, NT_X86_XSTATE, &whole) < 0)
			return -1;
		area_size = whole.iov_len;
	}
	if (given->iov_len >= area_size)
		return next_ptrace(PTRACE_SETREGSET, pid, NT_X86_XSTATE, given);
	memcpy(area, given->iov_base, given->iov_len);
	memset(area + given->iov_len, 0, area_size - given->iov_len);
	whole.iov_len = area_size;
	return next_ptrace(PTRACE_SETREGSET, pid, NT_X86_XSTATE, &whole);
}

long ptrace(enum __ptrace_request request, ...)
{
	va_list arguments;
	va_start(arguments, request);
	int pid = va_arg(arguments, int);
	void *address = va_arg(arguments, void *);
	void *data = va_arg(arguments, void *);
	va_end(arguments);

	long result;
	switch ((int)request) {
	case PTRACE_GETREGSET:
		result = next_ptrace(request, pid, address, data);
		if (result == 0 && (long)address == NT_X86_XSTATE)
			remember(pid, data);
		return result;
	case PTRACE_SETREGSET:
		if ((long)address != NT_X86_XSTATE)
			return next_ptrace(request, pid, address, data);
		if (holds(pid, data))
			return 0;
		result = set_registers(pid, data);
		if (result == 0)
			remember(pid, data);
		return result;
	case PTRACE_GETREGS:
	case PTRACE_SETREGS:
	case PTRACE_GETSIGINFO:
		/* The process stays stopped and its extended registers unchanged. */
		return next_ptrace(request, pid, address, data);
	default:
		held.length = 0;
		return next_ptrace(request, pid, address, data);
	}
}
